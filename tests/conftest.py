import torch

# Several threads help none of these small shapes, and make every test crawl on a busy machine.
torch.set_num_threads(1)
