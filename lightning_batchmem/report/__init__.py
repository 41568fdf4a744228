"""What a run reports: rows, metrics, tables and figures."""
