/* header_c99.c: the public header as C99 sees it, alone and first; its numbers, which callers have compiled
 * into them, and the layout of its structs. Needs no driver. */

#include "cudapool.h"

#include "check.h"

/* A wrong size is a compile error. */
#define STATIC_CHECK(name, condition) typedef char static_check_##name[(condition) ? 1 : -1]

STATIC_CHECK(request_size_first, offsetof(pool_request, struct_size) == 0);
STATIC_CHECK(info_size_first, offsetof(pool_block_info, struct_size) == 0);
STATIC_CHECK(stats_size_first, offsetof(pool_stats, struct_size) == 0);
STATIC_CHECK(options_size_first, offsetof(pool_options, struct_size) == 0);
STATIC_CHECK(status_is_an_int, sizeof(pool_status) == sizeof(int));
STATIC_CHECK(owner, sizeof(((pool_block_info *)0)->owner) == POOL_OWNER_SIZE);
/* 18 counters and `headroom_bytes`, nothing between them. */
STATIC_CHECK(stats_is_dense, offsetof(pool_stats, headroom_bytes) == sizeof(size_t) + 18 * sizeof(uint64_t));
/* No hidden padding that a caller's compiler and the library could see differently. */
STATIC_CHECK(request_padding, offsetof(pool_request, flags) % sizeof(uint64_t) == 0);

/* Every status, with the number it has for ever. */
static const struct {
  pool_status status;
  int number;
  const char *name;
} statuses[] = {
    {POOL_OK, 0, "POOL_OK"},
    {POOL_ERROR_INVALID_ARGUMENT, 100, "POOL_ERROR_INVALID_ARGUMENT"},
    {POOL_ERROR_INVALID_POINTER, 101, "POOL_ERROR_INVALID_POINTER"},
    {POOL_ERROR_DOUBLE_FREE, 102, "POOL_ERROR_DOUBLE_FREE"},
    {POOL_ERROR_INVALID_OPTION, 103, "POOL_ERROR_INVALID_OPTION"},
    {POOL_ERROR_NOT_SUPPORTED, 104, "POOL_ERROR_NOT_SUPPORTED"},
    {POOL_ERROR_IN_USE, 105, "POOL_ERROR_IN_USE"},
    {POOL_ERROR_OUT_OF_MEMORY, 200, "POOL_ERROR_OUT_OF_MEMORY"},
    {POOL_ERROR_HOST_OUT_OF_MEMORY, 201, "POOL_ERROR_HOST_OUT_OF_MEMORY"},
    {POOL_ERROR_NO_DRIVER, 300, "POOL_ERROR_NO_DRIVER"},
    {POOL_ERROR_NO_DEVICE, 301, "POOL_ERROR_NO_DEVICE"},
    {POOL_ERROR_DRIVER_VERSION, 302, "POOL_ERROR_DRIVER_VERSION"},
    {POOL_ERROR_DRIVER, 303, "POOL_ERROR_DRIVER"},
    {POOL_ERROR_CONTEXT_LOST, 304, "POOL_ERROR_CONTEXT_LOST"},
    {POOL_ERROR_FORKED, 400, "POOL_ERROR_FORKED"},
    {POOL_ERROR_SHUTTING_DOWN, 401, "POOL_ERROR_SHUTTING_DOWN"},
    {POOL_ERROR_INTERNAL, 900, "POOL_ERROR_INTERNAL"},
};
enum { STATUSES = sizeof statuses / sizeof statuses[0] };

static void statuses_have_fixed_numbers_and_names(void) {
  int i, j;
  for (i = 0; i < STATUSES; i++) {
    CHECK_EQ(statuses[i].status, statuses[i].number);
    CHECK(strcmp(pool_status_name(statuses[i].number), statuses[i].name) == 0);
    CHECK(strlen(pool_status_message(statuses[i].number)) > 0);
    for (j = 0; j < i; j++) {
      CHECK(strcmp(pool_status_message(statuses[i].number), pool_status_message(statuses[j].number)) != 0);
    }
  }
}

static void any_integer_has_a_name(void) {
  static const int numbers[] = {-1, 1, 99, 105, 199, 202, 299, 305, 402, 899, 901, INT32_MAX, INT32_MIN};
  int number, i;
  for (i = 0; i < (int)(sizeof numbers / sizeof numbers[0]); i++) {
    CHECK(pool_status_name(numbers[i]) != NULL && strlen(pool_status_name(numbers[i])) > 0);
    CHECK(pool_status_message(numbers[i]) != NULL && strlen(pool_status_message(numbers[i])) > 0);
    /* An unknown number is not mistaken for a known status. */
    CHECK(strcmp(pool_status_name(numbers[i]), "POOL_OK") != 0);
  }
  for (number = -2000; number < 2000; number++) {
    CHECK(pool_status_name(number) != NULL && pool_status_message(number) != NULL);
  }
}

static void constants_have_fixed_values(void) {
  CHECK_EQ(POOL_DEVICE_CURRENT, -1);
  CHECK_EQ(POOL_REQUEST_STREAM_ORDERED, 1);
  CHECK_EQ(POOL_REQUEST_OWN_ALLOCATION, 2);
  CHECK_EQ(POOL_DEFAULT_ALIGNMENT, 512);
  CHECK_EQ(POOL_MAX_ALIGNMENT, 1 << 30);
  CHECK_EQ(POOL_OWNER_SIZE, 32);
  CHECK_EQ(POOL_BACKEND_AUTO, 0);
  CHECK_EQ(POOL_BACKEND_VMM, 1);
  CHECK_EQ(POOL_BACKEND_MALLOC, 2);
  CHECK_EQ(POOL_ORDER_DEVICE, 0);
  CHECK_EQ(POOL_ORDER_STREAM, 1);
  CHECK_EQ(POOL_LOG_OFF, 0);
  CHECK_EQ(POOL_LOG_ERROR, 1);
  CHECK_EQ(POOL_LOG_WARN, 2);
  CHECK_EQ(POOL_LOG_INFO, 3);
  CHECK_EQ(POOL_LOG_DEBUG, 4);
}

static void library_and_header_agree_on_the_version(void) {
  CHECK_EQ(pool_version(), POOL_VERSION_MAJOR * 1000000 + POOL_VERSION_MINOR * 1000 + POOL_VERSION_PATCH);
}

int main(void) {
  RUN(statuses_have_fixed_numbers_and_names);
  RUN(any_integer_has_a_name);
  RUN(constants_have_fixed_values);
  RUN(library_and_header_agree_on_the_version);
  return check_result();
}
