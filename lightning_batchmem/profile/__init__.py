"""The steps of a run come in; records, metrics, alerts, a CSV file and a summary go out."""
