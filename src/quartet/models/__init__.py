"""Models: weights, forward passes, generation and training."""

import warnings

# Without ipywidgets, tqdm warns at every import in a notebook. transformers' progress bars are off anyway.
warnings.filterwarnings("ignore", message="IProgress not found")
