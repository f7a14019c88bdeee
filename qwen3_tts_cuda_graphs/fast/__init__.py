"""The same model, faster. Everything here works on upstream's weights and on the tensors of the three files.

rows.py         rows that come and go, each at a position of its own
frame_graphs.py the two graphs of a frame of 1 to N rows, which compute it in one of three ways
graph_set.py    those of a model, for each number of rows, each in the fastest way that runs here
layers.py       upstream's layers from fewer kernels
megakernel.py   all layers, heads and the sampling of one step in a single launch, where the GPU can
                (megakernel.cu; megakernel_reference.py is the same step in torch)
self_test.py    is the megakernel right, on this GPU and with these weights
paths.py        whether the megakernel makes a model's frames, in words
batched.py      the small kernels around the matrix products of many rows (batched.cu; batched_reference.py)
overlapped_stack.py
                the layers of 32, 64 or 128 rows in kernels that overlap, on Hopper (overlapped_stack.cu)
codec.py        the codec's decoder as CUDA graphs that keep their state between chunks
codec_decoder.py, codec_kernels.py
                the layers of that decoder with few kernels (codec_kernels.cu; codec_kernels_reference.py)

What the kernels share:

kernels.h       small device functions, for all .cu files
attention.h     attention by warps, for batched.cu; its sizes for overlapped_stack.cu
barriers.h      barriers that threads or copies arrive at, for megakernel.cu and overlapped_stack.cu
sampler.h       the choice of a token, for megakernel.cu and batched.cu
layer_kernels.py, layer_kernels.h
                norms and silu, for batched.cu and codec_kernels.cu (layer_kernels_reference.py)
kernels.py      from a .cu file to launches: can it run here, and if not, why; compilation, arguments
kernel_cache.py keeps what was compiled in a folder (cache_folder.py), and compiles in threads
nvrtc.py        compiles and launches CUDA source, without a toolkit
cublas.py       keeps cuBLAS's products to some of the multiprocessors
"""
