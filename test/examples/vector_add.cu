/* The kernel of vector_add.c, compiled to PTX when the example is built. */
extern "C" __global__ void vector_add(const float *a, const float *b, float *sum, int n)
{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) sum[i] = a[i] + b[i];
}
