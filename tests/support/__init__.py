"""What do several tests need? Models, strategies, oracles and ways to have ranks."""
