/* Built and run by serving_floor.py: a worker that writes one frame a step, and an ingress that
 * writes one chunk to each stream for it. Only system calls: no text, no scheduler, no router.
 *
 *     serving_floor ingress SOCKET LINK_PORT
 *     serving_floor worker LINK_PORT STEP_US FRAME_NBYTES
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static const char HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
static const char BODY[] =
    "data: {\"id\":\"cmpl-0123456789abcdef0123456789abcdef\",\"object\":\"text_completion\","
    "\"created\":1764000000,\"model\":\"demo-small\",\"choices\":[{\"index\":0,\"text\":\" the\","
    "\"logprobs\":null,\"finish_reason\":null}]}\n\n";

static void die(const char *what) { perror(what); exit(1); }

static void worker(int fd, long step_ns, int frame_nbytes) {
    char *frame = calloc(1, frame_nbytes);
    struct timespec next;
    clock_gettime(CLOCK_MONOTONIC, &next);
    for (;;) {
        next.tv_nsec += step_ns;
        if (next.tv_nsec >= 1000000000) { next.tv_nsec -= 1000000000; next.tv_sec++; }
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
        if (write(fd, frame, frame_nbytes) != frame_nbytes) exit(0);
    }
}

static void ingress(int link, int listening) {
    char chunk[1024], got[1 << 16];
    int nbytes = sprintf(chunk, "%zx\r\n%s\r\n", sizeof BODY - 1, BODY);
    char open[1024] = {0}; /* by file descriptor: whether it is a stream that has begun */
    int poll = epoll_create1(0);
    struct epoll_event each = {.events = EPOLLIN}, events[64];
    each.data.fd = link;
    epoll_ctl(poll, EPOLL_CTL_ADD, link, &each);
    each.data.fd = listening;
    epoll_ctl(poll, EPOLL_CTL_ADD, listening, &each);
    for (;;) {
        int num = epoll_wait(poll, events, 64, -1);
        for (int i = 0; i < num; i++) {
            int fd = events[i].data.fd;
            if (fd == listening) {
                each.data.fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK);
                epoll_ctl(poll, EPOLL_CTL_ADD, each.data.fd, &each);
                continue;
            }
            long count = read(fd, got, sizeof got);
            if (count <= 0) {
                if (fd == link) exit(0);
                open[fd] = 0;
                close(fd);
            } else if (fd != link) {
                if (!open[fd] && write(fd, HEAD, sizeof HEAD - 1) > 0) open[fd] = 1;
            } else {
                for (int stream = 0; stream < 1024; stream++)
                    if (open[stream] && write(stream, chunk, nbytes) != nbytes) open[stream] = 0;
            }
        }
    }
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN); /* clients leave */
    if (argc == 5 && !strcmp(argv[1], "worker")) {
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[2]))};
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
        while (connect(fd, (struct sockaddr *)&at, sizeof at)) usleep(10000);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        worker(fd, atol(argv[3]) * 1000, atoi(argv[4]));
    } else if (argc == 4 && !strcmp(argv[1], "ingress")) {
        struct sockaddr_un near = {.sun_family = AF_UNIX};
        strncpy(near.sun_path, argv[2], sizeof near.sun_path - 1);
        int listening = socket(AF_UNIX, SOCK_STREAM, 0), links = socket(AF_INET, SOCK_STREAM, 0), one = 1;
        if (bind(listening, (struct sockaddr *)&near, sizeof near) || listen(listening, 1024)) die(argv[2]);
        setsockopt(links, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[3]))};
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (bind(links, (struct sockaddr *)&at, sizeof at) || listen(links, 1)) die("link");
        ingress(accept(links, NULL, NULL), listening);
    }
    return 2;
}
