"""``python -m meshard compare``: a script once with torch's sharding, once with meshard's."""
