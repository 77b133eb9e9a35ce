"""Simulation of a day: replicas, their autoscaler and the traffic."""
