"""Builders of masks: each states the layout that it writes."""
