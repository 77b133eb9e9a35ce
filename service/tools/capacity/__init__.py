"""How many replicas, of what size: sizing from measurement, and what the autoscaler makes of a day."""
