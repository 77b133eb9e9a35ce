"""MLPerf's LoadGen as an independent load generator."""
