"""Matrix products: of rows or groups of rows, with dense or packed weights. A file for each schedule and its kinds."""
