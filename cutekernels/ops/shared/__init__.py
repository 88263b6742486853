"""The ground of several families: tensors in memory, remembered calls, registration with torch."""
