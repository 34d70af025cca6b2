"""Define methods by name or in YAML, and list the catalogue; needs no Optuna."""
