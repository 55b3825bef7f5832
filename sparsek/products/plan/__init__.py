"""Plans of products."""
