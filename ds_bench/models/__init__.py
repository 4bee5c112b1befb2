"""Model architectures: presets, parameter counts, and the look-up of a model by its name."""
