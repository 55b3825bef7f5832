"""Plans of attention."""
