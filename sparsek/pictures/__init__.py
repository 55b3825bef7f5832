"""Pictures of blocks and masks."""
