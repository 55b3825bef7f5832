"""Masks from other forms, and other forms from masks."""
