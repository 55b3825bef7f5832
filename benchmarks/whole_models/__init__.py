"""What pruning does to two real models, at equal stored values and calibration, and what each repair gives back."""
