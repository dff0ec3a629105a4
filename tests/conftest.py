"""One thread: on tensors this small a second one makes every test several times slower."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start

import torch

torch.set_num_threads(1)
