"""What several families stand on: tensors in memory, remembered calls, registration with torch."""
