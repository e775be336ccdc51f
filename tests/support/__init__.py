"""What several tests share: models, strategies, oracles and ways to have ranks."""
