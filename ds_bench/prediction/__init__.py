"""How much memory a trial will take, before it runs: DeepSpeed's own arithmetic and the model's own activations.

``modelstates`` and ``activations`` know a model, ``memorycase`` what decides where bytes live, ``replicated`` (stages 0
to 2), ``sharded`` and ``gathering`` (stage 3) what DeepSpeed makes of it, ``memory`` puts them together, ``fitplan``
asks what would fit on a card (``cards``), ``hindsight`` holds a prediction against what was measured.
"""
