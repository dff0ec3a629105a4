"""One thread, since a second one makes every test on tensors this small several times slower; short windows of depth,
so that toys of a few layers have several."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start

import torch

from depthlit.residuals import bank

torch.set_num_threads(1)
bank.WINDOW = 3
