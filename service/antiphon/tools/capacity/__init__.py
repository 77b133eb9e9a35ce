"""Capacity planning: size and number of replicas from measurements, and simulation of the autoscaler over a day."""
