/* worker_thread NAME yield|work: one thread of that name that waits in a loop, or computes. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *name, *kind;
static volatile unsigned long sink;

static void *run(void *unused) {
  pthread_setname_np(pthread_self(), name);
  puts("ready");
  fflush(stdout);
  if (strcmp(kind, "yield") == 0)
    for (;;) sched_yield();
  for (;;) sink++;
  return unused;
}

int main(int argc, char **argv) {
  pthread_t thread;
  if (argc != 3) return 2;
  name = argv[1];
  kind = argv[2];
  if (pthread_create(&thread, NULL, run, NULL) != 0) return 1;
  for (;;) pause();
}
