"""What a user would take instead, behind one protocol."""
