"""Methods by name and from YAML, Lightning's flavour, and the catalogue; needs no Optuna."""
