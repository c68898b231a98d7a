"""Full batches and streams: fits to a tolerance, with certificates, and steps on what comes by."""
