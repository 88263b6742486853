"""Matrix products: of all rows or of groups of them, with dense or packed weights, behind a norm or none."""
