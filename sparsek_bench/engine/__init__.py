"""How anything is measured, recorded and printed."""
