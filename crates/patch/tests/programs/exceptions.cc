/* Sixteen threads throw, catch, rethrow, hand on and are cancelled through functions that a test patches and reverts.
 *
 *   exceptions CONTROL [throwing threads [microseconds of rest between rounds]]
 */
#include "control.h"

#include <cxxabi.h>
#include <exception>
#include <execinfo.h>
#include <mutex>
#include <new>
#include <pthread.h>
#include <stdexcept>
#include <string>

#define VERSION 1

namespace {

/* Its type information and its destructor are the program's; both versions must mean the same type. */
struct Fault : std::runtime_error {
    long value;
    int version;
    Fault(long value, int version) : std::runtime_error("fault"), value(value), version(version) {}
};

struct Cleanup {
    long *at;
    long by;
    ~Cleanup() { *at += by; }
};

std::once_flag once;
std::atomic<long> once_calls;
thread_local std::string scratch = "per thread";
std::mutex handing;

} // namespace

struct Shape {
    virtual ~Shape() {}
    virtual long area(long x) = 0;
};

struct Square : Shape {
    PATCHED long area(long x) override {
        if (x < 0) throw Fault(-x, VERSION);
        return x * x * 16 + VERSION;
    }
};

PATCHED long thrower(long x) {
    switch (x % 4) {
    case 0: throw Fault(x, VERSION);
    case 1: throw std::out_of_range(std::to_string(x * 16 + VERSION));
    case 2: throw x * 16 + VERSION;
    }
    return x * 16 + VERSION;
}

/* Nothing is caught here; what must be cleaned up is. */
PATCHED long passer(long x, long *cleaned) {
    Cleanup cleanup{cleaned, VERSION};
    std::string text(size_t(x % 64) + 32, 'x');
    long got = thrower(x);
    return text.size() ? got : 0;
}

/* The version of all three, one above the other. */
PATCHED long catcher(long x) {
    long cleaned = 0, thrown;
    try {
        thrown = passer(x, &cleaned);
    } catch (const Fault &fault) {
        thrown = fault.value * 16 + fault.version;
    } catch (const std::logic_error &error) {
        thrown = std::stol(error.what());
    } catch (long value) {
        thrown = value;
    }
    return thrown << 8 | cleaned << 4 | VERSION;
}

PATCHED long again(long x, long *cleaned) {
    try {
        return passer(x, cleaned);
    } catch (const Fault &) {
        *cleaned += VERSION << 4;
        throw;
    } catch (...) {
        *cleaned += VERSION << 4;
        std::rethrow_exception(std::current_exception());
    }
}

PATCHED std::exception_ptr capture(long x) {
    try {
        thrower(x);
    } catch (...) {
        return std::current_exception();
    }
    return nullptr;
}

PATCHED long shielded(long x) noexcept {
    long cleaned = 0;
    try {
        return passer(x, &cleaned);
    } catch (...) {
        return cleaned;
    }
}

PATCHED long waits(long *cleaned) {
    Cleanup cleanup{cleaned, VERSION};
    for (;;) usleep(1000000);
}

PATCHED long looks_back() {
    void *frames[64];
    return backtrace(frames, 64) * 16 + VERSION;
}

PATCHED long state(long x) {
    static std::string *const made = new std::string("made once");
    std::call_once(once, [] { once_calls++; });
    scratch = *made + std::to_string(x);
    return (long)scratch.size() * 16 + VERSION;
}

/* --- Nothing below is patched ------------------------------------------------------------------------------------- */

static volatile bool shape_negative;

static void caught(struct observer *o, uint64_t p, long x) {
    long cleaned = 0, value = -1;
    int version = 0;
    try {
        value = again(x, &cleaned);
        version = value & 15;
        value >>= 4;
        cleaned |= version << 4;
    } catch (const Fault &fault) {
        value = fault.value, version = fault.version;
    } catch (const std::out_of_range &error) {
        value = std::stol(error.what()) >> 4, version = std::stol(error.what()) & 15;
    } catch (long thrown) {
        value = thrown >> 4, version = thrown & 15;
    }
    if (value != x || cleaned != (version << 4 | version))
        violation("again: %ld thrown as %ld by version %d, cleaned up %#lx", x, value, version, cleaned);
    observe(o, p, version, "again");
}

static void one_round(struct observer *o, long n, Shape *shape) {
    for (long x = n; x < n + 8; x++) {
        uint64_t p = phase_now();
        long chain = catcher(x);
        int version = chain & 15;
        if ((chain >> 4 & 15) != version || (chain >> 8 & 15) != version || chain >> 12 != x)
            violation("chain: %#lx for %ld is of more than one version", chain, x);
        observe(o, p, version, "chain");
        p = phase_now();
        caught(o, p, x);
    }
    uint64_t p = phase_now();
    try {
        long got = shape->area(shape_negative ? -n : n);
        answer(o, p, got, n * n, "area");
    } catch (const Fault &fault) {
        violation("area threw %ld", fault.value);
    }
    p = phase_now();
    long got = shielded(n | 3);
    if (got >> 4 != (n | 3)) violation("shielded: %#lx", got);
    observe(o, p, got & 15, "shielded");
    p = phase_now();
    answer(o, p, state(n), (long)(9 + std::to_string(n).size()), "state");
    if (once_calls != 1) violation("call_once called %ld times", once_calls.load());
    static thread_local long frames;
    p = phase_now();
    long depth = looks_back();
    if (frames == 0) frames = depth >> 4;
    answer(o, p, depth, frames, "backtrace");
    if (frames < 4) violation("backtrace shows %ld frames", frames);
}

static int rest_us = 200;

static void *throws(void *argument) {
    struct observer o = observer_new("thrower");
    Square square;
    for (long n = (long)argument; !stopping(); n = (n + 11) % 100000) {
        one_round(&o, n, &square);
        if (rest_us) usleep(rest_us);
    }
    return NULL;
}

/* What one thread has caught another one throws again, long after the frames are gone. */
static std::exception_ptr handed;

static void *hands_on(void *) {
    struct observer o = observer_new("hander");
    for (long n = 0; !stopping(); n = (n + 4) % 100000) {
        uint64_t p = phase_now();
        std::exception_ptr mine = capture(n), other;
        try {
            std::rethrow_exception(mine);
        } catch (const Fault &fault) {
            if (fault.value != n) violation("captured %ld as %ld", n, fault.value);
            observe(&o, p, fault.version, "capture");
        }
        {
            std::lock_guard<std::mutex> lock(handing);
            other = handed;
            handed = mine;
        }
        try {
            if (other) std::rethrow_exception(other);
        } catch (const std::exception &error) {
            if (std::string(error.what()) != "fault") violation("handed on: %s", error.what());
        }
        usleep(rest_us);
    }
    return NULL;
}

static void *is_cancelled(void *argument) {
    Cleanup cleanup{(long *)argument, 1 << 8};
    waits((long *)argument);
    return NULL;
}

static void *cancels(void *) {
    struct observer o = observer_new("canceller");
    while (!stopping()) {
        long cleaned = 0;
        void *end = NULL;
        pthread_t thread;
        uint64_t p = phase_now();
        if (pthread_create(&thread, NULL, is_cancelled, &cleaned)) abort();
        usleep(1000);
        pthread_cancel(thread);
        pthread_join(thread, &end);
        if (end != PTHREAD_CANCELED) violation("not cancelled");
        /* Cancelled before it came to the patched function: only what is above was cleaned up. */
        if (cleaned == 1 << 8) continue;
        if (cleaned >> 8 != 1) violation("cancelled: cleaned up %#lx", cleaned);
        int version = cleaned & 255;
        /* A thread of its own: it is on either side, whatever this one has seen. */
        int from = p & 255, to = p >> 8 & 255;
        if (p == phase_now() && version != from && version != to) violation("cancelled in version %d", version);
        if (from == to) {
            observe(&o, p, version, "cancel");
        } else {
            o.phase = 0;
            o.slot->calls++;
        }
        usleep(rest_us);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    control_open(argv[1]);
    int threads = argc > 2 ? atoi(argv[2]) : 12;
    if (argc > 3) rest_us = atoi(argv[3]);
    for (long i = 0; i < threads; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, throws, (void *)(i * 1000))) return 1;
    }
    void *(*const others[])(void *) = {hands_on, hands_on, cancels, cancels};
    for (auto other : others) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, other, NULL)) return 1;
    }
    await_slots(threads + 4);
    while (!stopping()) usleep(1000);
    /* Others still throw: they end with the process. */
    _exit(0);
}
