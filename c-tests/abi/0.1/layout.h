/* layout.h: sizes, offsets and numbers that programs built with the header of 0.1 have compiled into them,
 * on a 64-bit system. Whoever includes this says what STRUCT, FIELD and CONSTANT check. Never edited: what a
 * later version adds belongs to that version's list. */

#ifndef ABI_0_1_LAYOUT_H
#define ABI_0_1_LAYOUT_H

/* STRUCT: name, size. FIELD: struct, name, offset, size. */
#define ABI_0_1_LAYOUT(STRUCT, FIELD)                    \
  STRUCT(pool_request, 64)                               \
  FIELD(pool_request, struct_size, 0, 8)                 \
  FIELD(pool_request, pool, 8, 8)                        \
  FIELD(pool_request, size, 16, 8)                       \
  FIELD(pool_request, alignment, 24, 8)                  \
  FIELD(pool_request, device, 32, 4)                     \
  FIELD(pool_request, reserved, 36, 4)                   \
  FIELD(pool_request, flags, 40, 8)                      \
  FIELD(pool_request, stream, 48, 8)                     \
  FIELD(pool_request, owner, 56, 8)                      \
  STRUCT(pool_block_info, 88)                            \
  FIELD(pool_block_info, struct_size, 0, 8)              \
  FIELD(pool_block_info, base, 8, 8)                     \
  FIELD(pool_block_info, requested_size, 16, 8)          \
  FIELD(pool_block_info, usable_size, 24, 8)             \
  FIELD(pool_block_info, device, 32, 4)                  \
  FIELD(pool_block_info, order, 36, 4)                   \
  FIELD(pool_block_info, stream, 40, 8)                  \
  FIELD(pool_block_info, owner, 48, 32)                  \
  FIELD(pool_block_info, pool, 80, 8)                    \
  STRUCT(pool_options, 64)                               \
  FIELD(pool_options, struct_size, 0, 8)                 \
  FIELD(pool_options, limit_bytes, 8, 8)                 \
  FIELD(pool_options, limit_percent, 16, 4)              \
  FIELD(pool_options, max_idle_percent, 20, 4)           \
  FIELD(pool_options, backend, 24, 4)                    \
  FIELD(pool_options, order, 28, 4)                      \
  FIELD(pool_options, settle_ms, 32, 4)                  \
  FIELD(pool_options, log, 36, 4)                        \
  FIELD(pool_options, reserve_bytes, 40, 8)              \
  FIELD(pool_options, reserve_percent, 48, 4)            \
  FIELD(pool_options, oom_wait_ms, 52, 4)                \
  FIELD(pool_options, spill, 56, 4)                      \
  FIELD(pool_options, reserved, 60, 4)                   \
  STRUCT(pool_stats, 184)                                \
  FIELD(pool_stats, struct_size, 0, 8)                   \
  FIELD(pool_stats, live_bytes, 8, 8)                    \
  FIELD(pool_stats, live_bytes_peak, 16, 8)              \
  FIELD(pool_stats, requested_bytes, 24, 8)              \
  FIELD(pool_stats, cached_bytes, 32, 8)                 \
  FIELD(pool_stats, pending_bytes, 40, 8)                \
  FIELD(pool_stats, overhead_bytes, 48, 8)               \
  FIELD(pool_stats, reserved_bytes, 56, 8)               \
  FIELD(pool_stats, reserved_bytes_peak, 64, 8)          \
  FIELD(pool_stats, live_blocks, 72, 8)                  \
  FIELD(pool_stats, alloc_count, 80, 8)                  \
  FIELD(pool_stats, free_count, 88, 8)                   \
  FIELD(pool_stats, driver_alloc_calls, 96, 8)           \
  FIELD(pool_stats, driver_free_calls, 104, 8)           \
  FIELD(pool_stats, driver_map_calls, 112, 8)            \
  FIELD(pool_stats, driver_unmap_calls, 120, 8)          \
  FIELD(pool_stats, driver_sync_calls, 128, 8)           \
  FIELD(pool_stats, oom_count, 136, 8)                   \
  FIELD(pool_stats, oom_recovered_count, 144, 8)         \
  FIELD(pool_stats, reserve_bytes, 152, 8)               \
  FIELD(pool_stats, spilled_bytes, 160, 8)               \
  FIELD(pool_stats, spill_count, 168, 8)                 \
  FIELD(pool_stats, oom_wait_count, 176, 8)              \
  STRUCT(pool_oom_info, 456)                             \
  FIELD(pool_oom_info, struct_size, 0, 8)                \
  FIELD(pool_oom_info, requested_bytes, 8, 8)            \
  FIELD(pool_oom_info, device, 16, 4)                    \
  FIELD(pool_oom_info, advice, 20, 4)                    \
  FIELD(pool_oom_info, rungs_tried, 24, 8)               \
  FIELD(pool_oom_info, rung_bytes, 32, 88)               \
  FIELD(pool_oom_info, rung_micros, 120, 88)             \
  FIELD(pool_oom_info, live_bytes, 208, 8)               \
  FIELD(pool_oom_info, cached_bytes, 216, 8)             \
  FIELD(pool_oom_info, pending_bytes, 224, 8)            \
  FIELD(pool_oom_info, overhead_bytes, 232, 8)           \
  FIELD(pool_oom_info, reserved_bytes, 240, 8)           \
  FIELD(pool_oom_info, limit_bytes, 248, 8)              \
  FIELD(pool_oom_info, largest_free_bytes, 256, 8)       \
  FIELD(pool_oom_info, device_free_bytes, 264, 8)        \
  FIELD(pool_oom_info, device_total_bytes, 272, 8)       \
  FIELD(pool_oom_info, pools_bytes, 280, 8)              \
  FIELD(pool_oom_info, foreign_bytes, 288, 8)            \
  FIELD(pool_oom_info, owners, 296, 128)                 \
  FIELD(pool_oom_info, owner_bytes, 424, 32)

/* Name, value. */
#define ABI_0_1_CONSTANTS(CONSTANT)                      \
  CONSTANT(POOL_DEVICE_CURRENT, -1)                      \
  CONSTANT(POOL_REQUEST_STREAM_ORDERED, 1)               \
  CONSTANT(POOL_REQUEST_OWN_ALLOCATION, 2)               \
  CONSTANT(POOL_DEFAULT_ALIGNMENT, 512)                  \
  CONSTANT(POOL_MAX_ALIGNMENT, 1073741824)               \
  CONSTANT(POOL_OWNER_SIZE, 32)                          \
  CONSTANT(POOL_BACKEND_AUTO, 0)                         \
  CONSTANT(POOL_BACKEND_VMM, 1)                          \
  CONSTANT(POOL_BACKEND_MALLOC, 2)                       \
  CONSTANT(POOL_ORDER_DEVICE, 0)                         \
  CONSTANT(POOL_ORDER_STREAM, 1)                         \
  CONSTANT(POOL_SPILL_OFF, 0)                            \
  CONSTANT(POOL_SPILL_HOST, 1)                           \
  CONSTANT(POOL_LOG_OFF, 0)                              \
  CONSTANT(POOL_LOG_ERROR, 1)                            \
  CONSTANT(POOL_LOG_WARN, 2)                             \
  CONSTANT(POOL_LOG_INFO, 3)                             \
  CONSTANT(POOL_LOG_DEBUG, 4)                            \
  CONSTANT(POOL_OOM_RUNGS, 11)                           \
  CONSTANT(POOL_OOM_OWNERS, 4)                           \
  CONSTANT(POOL_ADVICE_NONE, 0)                          \
  CONSTANT(POOL_ADVICE_RAISE_LIMIT, 1)                   \
  CONSTANT(POOL_ADVICE_FREE_FOREIGN, 2)                  \
  CONSTANT(POOL_ADVICE_DEFRAGMENT, 3)                    \
  CONSTANT(POOL_ADVICE_END_CAPTURE, 4)                   \
  CONSTANT(POOL_ADVICE_USE_LESS, 5)                      \
  CONSTANT(POOL_ADVICE_WAIT, 6)                          \
  CONSTANT(POOL_OK, 0)                                   \
  CONSTANT(POOL_ERROR_INVALID_ARGUMENT, 100)             \
  CONSTANT(POOL_ERROR_INVALID_POINTER, 101)              \
  CONSTANT(POOL_ERROR_DOUBLE_FREE, 102)                  \
  CONSTANT(POOL_ERROR_INVALID_OPTION, 103)               \
  CONSTANT(POOL_ERROR_NOT_SUPPORTED, 104)                \
  CONSTANT(POOL_ERROR_IN_USE, 105)                       \
  CONSTANT(POOL_ERROR_OUT_OF_MEMORY, 200)                \
  CONSTANT(POOL_ERROR_HOST_OUT_OF_MEMORY, 201)           \
  CONSTANT(POOL_ERROR_NO_DRIVER, 300)                    \
  CONSTANT(POOL_ERROR_NO_DEVICE, 301)                    \
  CONSTANT(POOL_ERROR_DRIVER_VERSION, 302)               \
  CONSTANT(POOL_ERROR_DRIVER, 303)                       \
  CONSTANT(POOL_ERROR_CONTEXT_LOST, 304)                 \
  CONSTANT(POOL_ERROR_FORKED, 400)                       \
  CONSTANT(POOL_ERROR_SHUTTING_DOWN, 401)                \
  CONSTANT(POOL_ERROR_INTERNAL, 900)

/* A wrong number is a compile error at the line of its name; C99 has no other. */
#define ABI_CHECK(condition) extern int abi_check[(condition) ? 1 : -1];
#define ABI_CONSTANT(name, value) ABI_CHECK((name) == (value))
#define ABI_FIELD(type, field, offset, size) \
  ABI_CHECK(offsetof(type, field) == (offset) && sizeof(((type *)0)->field) == (size))

#endif /* ABI_0_1_LAYOUT_H */
