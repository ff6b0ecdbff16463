/* Has a process read a clock that is some seconds off. Loaded by LD_PRELOAD.
 *
 * GSHARD_CLOCK names a file of eight bytes: how many seconds the clock is ahead. A change is seen
 * at once, as after a correction of the clock of a machine. Clocks that only count stay right, and
 * so do waits: deadlines by the wrong clock are translated for the kernel, whose clock is right.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* A deadline beyond it is a date; a smaller one counts from the start of the machine. */
#define FIRST_DATE 1000000000

static const volatile int64_t none;
static const volatile int64_t *ahead = &none;
static long (*real_syscall)(long, ...);
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static int (*real_cond_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_sem_timedwait)(sem_t *, const struct timespec *);

__attribute__((constructor)) static void begin(void) {
  real_syscall = dlsym(RTLD_NEXT, "syscall");
  real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  real_sem_timedwait = dlsym(RTLD_NEXT, "sem_timedwait");
  /* The first version, of 2002, has another layout of the condition. */
  real_cond_timedwait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (!real_cond_timedwait) real_cond_timedwait = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  const char *path = getenv("GSHARD_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *found = mmap(0, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
  if (found != MAP_FAILED) ahead = found;
  close(file);
}

static const struct timespec *right(const struct timespec *deadline, struct timespec *space) {
  if (!deadline || deadline->tv_sec < FIRST_DATE) return deadline;
  *space = *deadline;
  space->tv_sec -= *ahead;
  return space;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!real_clock_gettime) begin();
  int result = real_clock_gettime(clock, now);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *ahead;
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &found)) return -1;
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *place) {
  struct timespec found;
  if (clock_gettime(CLOCK_REALTIME, &found)) return -1;
  if (place) *place = found.tv_sec;
  return found.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
  struct timespec space;
  return real_cond_timedwait(condition, mutex, right(deadline, &space));
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
  struct timespec space;
  return real_sem_timedwait(semaphore, right(deadline, &space));
}

/* Abseil, in jaxlib, waits by this call. */
long syscall(long number, ...) {
  va_list list;
  long words[6];
  struct timespec space;
  if (!real_syscall) begin();
  va_start(list, number);
  for (int i = 0; i < 6; i++) words[i] = va_arg(list, long);
  va_end(list);
  if (number == SYS_futex && (words[1] & FUTEX_CLOCK_REALTIME))
    words[3] = (long)right((const struct timespec *)words[3], &space);
  return real_syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
