"""Products with packed weights of four and eight bits, a body a schedule."""
