"""Tests of deploy/ with the tools for which it is written: rendering, checks, scrapes and load balancing."""
