/* What the files of the stand-in share. Types and codes are those of the AscendCL and HCCL API references
 * (acl/acl_rt.h, hccl/hccl_types.h); nothing is included from CANN, which is not there. */

#ifndef STANDIN_H
#define STANDIN_H

#include <stddef.h>
#include <stdint.h>

enum { SUCCESS = 0, NO_DEVICE = 107001, NO_MEMORY = 207001, INTERNAL = 507000 };

/* Puts work at the end of a stream: `run(argument)`, on the stream's own thread, after all that was put before it.
 * `argument` (of `size` bytes) is copied. A result that is not SUCCESS stays with the stream: who waits for it is told. */
void on_stream(void *stream, int (*run)(void *), const void *argument, size_t size);

#endif
