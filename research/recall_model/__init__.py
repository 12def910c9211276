"""The parts of `train_recall_model.py`."""
