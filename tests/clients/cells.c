/*
 * Many calls at once, each on a thread of its own, without any timeout of its own: by blocking
 * sockets, by io_uring ("uring"), or by sockets that do not block, whose connect io_uring waits for
 * ("poll").
 *
 * Says "ready", then reads lines "KIND VALUE_MS HOST PORT" up to the end of its input, makes all of
 * these calls at once, and prints "INDEX ERROR MICROSECONDS" for each: what ended it, and when,
 * reckoned from where the timeout of that kind begins to count.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MOST 256
#define CHUNK 65536

struct cell {
    char kind[16], host[64];
    int value_ms, port, error;
    long long elapsed_us;
};

static struct cell cells[MOST];
static int uring, polled;
static char chunk[CHUNK];

static long long now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000LL + time.tv_nsec / 1000;
}

/* Waits for the one request in the ring; the result as system calls give it. */
static long complete(struct io_uring *ring) {
    struct io_uring_cqe *cqe;
    long result;
    do
        result = io_uring_submit_and_wait(ring, 1);
    while (result == -EINTR);
    if (result < 0 || (result = io_uring_wait_cqe(ring, &cqe)) < 0)
        exit(3);
    result = cqe->res;
    io_uring_cqe_seen(ring, cqe);
    if (result >= 0)
        return result;
    errno = -result;
    return -1;
}

static long do_connect(struct io_uring *ring, int fd, struct sockaddr *to, socklen_t length) {
    if (polled) {
        int error = 0;
        socklen_t size = sizeof error;
        if (connect(fd, to, length) < 0 && errno != EINPROGRESS)
            return -1;
        io_uring_prep_poll_add(io_uring_get_sqe(ring), fd, POLLOUT);
        if (complete(ring) < 0 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) < 0)
            return -1;
        errno = error;
        return error ? -1 : fcntl(fd, F_SETFL, 0);
    }
    if (!uring)
        return connect(fd, to, length);
    io_uring_prep_connect(io_uring_get_sqe(ring), fd, to, length);
    return complete(ring);
}

static long do_send(struct io_uring *ring, int fd, const void *from, size_t count) {
    if (!uring)
        return send(fd, from, count, MSG_NOSIGNAL);
    io_uring_prep_send(io_uring_get_sqe(ring), fd, from, count, MSG_NOSIGNAL);
    return complete(ring);
}

static long do_recv(struct io_uring *ring, int fd, void *into, size_t count) {
    if (!uring)
        return recv(fd, into, count, 0);
    io_uring_prep_recv(io_uring_get_sqe(ring), fd, into, count, 0);
    return complete(ring);
}

static void *call(void *argument) {
    struct cell *cell = argument;
    struct io_uring ring;
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(cell->port)};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(cell->port)};
    struct sockaddr *to = (struct sockaddr *)&four;
    socklen_t length = sizeof four;
    if (inet_pton(AF_INET, cell->host, &four.sin_addr) != 1) {
        if (inet_pton(AF_INET6, cell->host, &six.sin6_addr) != 1)
            exit(3);
        to = (struct sockaddr *)&six;
        length = sizeof six;
    }
    if ((uring || polled) && io_uring_queue_init(4, &ring, 0) < 0)
        exit(3);
    int fd = socket(to->sa_family, SOCK_STREAM | (polled ? SOCK_NONBLOCK : 0), 0);
    long long begin = now_us();
    char byte;
    if (do_connect(&ring, fd, to, length) < 0)
        goto ended;
    if (!strcmp(cell->kind, "write")) {
        begin = now_us();
        /* A part of it: the rest was waited for in vain. */
        for (long sent = CHUNK; sent > 0;) {
            sent = do_send(&ring, fd, chunk, CHUNK);
            if (sent == CHUNK)
                begin = now_us();
        }
        goto ended;
    }
    if (!strcmp(cell->kind, "deadline")) {
        /* A request in two parts: the deadline counts from the first. */
        if (do_send(&ring, fd, "GET / HTTP/1.1\r\n", 16) < 0)
            goto ended;
        usleep(cell->value_ms * 300);
    } else if (do_send(&ring, fd, "GET / HTTP/1.1\r\n", 16) < 0)
        goto ended;
    if (do_send(&ring, fd, "Host: cells\r\n\r\n", 15) < 0)
        goto ended;
    if (!strcmp(cell->kind, "read"))
        begin = now_us();
    errno = 0;
    if (do_recv(&ring, fd, &byte, 1) >= 0)
        errno = 0;
ended:
    cell->error = errno;
    cell->elapsed_us = now_us() - begin;
    close(fd);
    return NULL;
}

int main(int count, char **arguments) {
    pthread_t threads[MOST];
    int number = 0;
    uring = count > 1 && !strcmp(arguments[1], "uring");
    polled = count > 1 && !strcmp(arguments[1], "poll");
    signal(SIGPIPE, SIG_IGN);
    puts("ready");
    fflush(stdout);
    while (number < MOST) {
        struct cell *cell = &cells[number];
        if (scanf("%15s %d %63s %d", cell->kind, &cell->value_ms, cell->host, &cell->port) != 4)
            break;
        number++;
    }
    for (int i = 0; i < number; i++)
        if (pthread_create(&threads[i], NULL, call, &cells[i]))
            exit(3);
    for (int i = 0; i < number; i++) {
        pthread_join(threads[i], NULL);
        printf("%d %d %lld\n", i, cells[i].error, cells[i].elapsed_us);
    }
    return 0;
}
