"""The table of families: from the name in a configuration to the row that describes the model.

May import: models.expert_families, models.families, models.latent_families, models.state_families.
Door: `register_family` in registry.py.
"""
