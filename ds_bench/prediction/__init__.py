"""Predicts a trial's memory before it runs, from DeepSpeed's own arithmetic and the model's own activations.

``model_states`` and ``model_profile`` describe the model, ``inputs`` the settings that decide where bytes are kept.
``stages_0_to_2`` and ``stage_3`` compute what a rank holds, ``predicted_memory`` sums it up. ``what_if`` finds changes
that would make a trial fit, ``trial_predictions`` attaches predictions to trials and compares them with measurements.
"""
