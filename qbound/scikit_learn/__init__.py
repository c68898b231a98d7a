"""What the estimator needs beside a fit to be one of scikit-learn's; by public names of scikit-learn alone."""
