"""What other libraries keep in their layers, as kernels take it: adapters, quantized weights."""
