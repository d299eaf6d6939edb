/* abi_now.c: the present header has every field and number of the 0.1 header where programs built with that
 * one expect them. What is checked is that this compiles; it runs to say so. */

#include "cudapool.h"

#include <stdio.h>

/* Renamed since, not moved. */
#define reserve_bytes headroom_bytes
#define reserve_percent headroom_percent

#include "abi/0.1/layout.h"

/* A struct may have grown at its end. */
#define ABI_STRUCT(type, size) ABI_CHECK(sizeof(type) >= (size))

ABI_0_1_LAYOUT(ABI_STRUCT, ABI_FIELD)
ABI_0_1_CONSTANTS(ABI_CONSTANT)

int main(void) {
  printf("the layout of 0.1 holds for the header of %d.%d.%d\n", POOL_VERSION_MAJOR, POOL_VERSION_MINOR,
         POOL_VERSION_PATCH);
  return 0;
}
