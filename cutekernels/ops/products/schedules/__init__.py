"""Schedules of products, a file each: rules, model and body."""
