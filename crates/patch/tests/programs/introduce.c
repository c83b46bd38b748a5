/* Introduces itself to a helper of `stillpoint patch exec` (crates/patch/tracee/src/launch/introduction.rs), in the right way
 * or not, and executes a program. Says first whether the helper follows.
 *
 *   introduce SOCKET right|standard|first UID PROGRAM ARGUMENTS...
 *
 *   right      as the tool does
 *   standard   its end of the connection is descriptor 2 alone
 *   first      speaks without being asked, by number, as earlier versions did
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

static void fail(const char *what) {
    perror(what);
    exit(126);
}

static void answer(int to, int with, const unsigned char challenge[16]) {
    unsigned char bytes[18] = {2, 0};
    memcpy(bytes + 2, challenge, 16);
    struct iovec part = {bytes, sizeof bytes};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(rights), &with, sizeof with);
    if (sendmsg(to, &message, MSG_NOSIGNAL) != sizeof bytes) fail("sendmsg");
}

int main(int argc, char **argv) {
    if (argc < 5) return 126;
    uid_t uid = (uid_t)atoi(argv[3]);
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    if (strlen(argv[1]) >= sizeof to.sun_path) return 126;
    strcpy(to.sun_path, argv[1]);
    if (setresgid(uid, uid, uid) || setresuid(uid, uid, uid)) fail("setresuid");
    int helper = socket(AF_UNIX, SOCK_STREAM, 0);
    if (helper < 0 || connect(helper, (struct sockaddr *)&to, sizeof to)) fail("connect");
    struct timeval limit = {20, 0};
    if (setsockopt(helper, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit)) fail("SO_RCVTIMEO");
    unsigned char challenge[16] = {0};
    if (!strcmp(argv[2], "first")) {
        int number = 2;
        char said[5] = {0};
        memcpy(said + 1, &number, sizeof number);
        if (dup2(helper, 2) < 0 || send(2, said, sizeof said, MSG_NOSIGNAL) != sizeof said) fail("send");
        close(helper);
        helper = 2;
        char rest[16];
        if (recv(helper, rest, sizeof rest, MSG_WAITALL) < 0) fail("recv");
    } else if (recv(helper, challenge, sizeof challenge, MSG_WAITALL) == sizeof challenge) {
        int standard = !strcmp(argv[2], "standard");
        if (standard) {
            if (dup2(helper, 2) < 0) fail("dup2");
            close(helper);
            helper = 2;
        }
        answer(helper, helper, challenge);
    }
    char ready = 0;
    int follows = recv(helper, &ready, 1, 0) == 1 && ready == 'r';
    limit.tv_sec = 0;
    setsockopt(helper, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    printf("followed: %d\n", follows);
    fflush(stdout);
    execv(argv[4], argv + 4);
    fail("execv");
}
