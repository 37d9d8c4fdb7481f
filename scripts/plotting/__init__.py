"""Parts of `scripts/plot_metrics.py`: runs read from disk (`data`), the picture (`png`) and the page (`page`)."""
