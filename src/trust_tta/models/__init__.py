"""VMamba: its variants as data, its layers, its checkpoints."""
