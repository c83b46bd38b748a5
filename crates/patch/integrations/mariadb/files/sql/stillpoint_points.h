/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * stillpoint_points.h - places where MariaDB's threads hold no state of old code, and when they must not block there
 *
 * A thread blocks at a group or global request only when no thread can wait for a resource that it, or a connection that
 * it would serve, holds: an open transaction, LOCK TABLES, FLUSH TABLES WITH READ LOCK, GET_LOCK, a HANDLER, a backup
 * stage, a prepared XA transaction. A transaction is served to its end by the code it began with. At a local request no
 * thread blocks, and a patch that one thread at a time may take changes no state that threads share: there the points
 * count between the statements of a transaction as well.
 *
 * Roles, in the order in which they block: active worker (or the thread of a connection), sleeping worker, and threads
 * on which both depend: listener, timer, the thread that accepts connections, new threads.
 */
#ifndef STILLPOINT_POINTS_H
#define STILLPOINT_POINTS_H

#include <atomic>

#include "stillpoint_abi.h"

class CONNECT;
class THD;
struct TP_connection;

enum stillpoint_role
{
  STILLPOINT_ACTIVE= 0,
  STILLPOINT_SLEEPING= 1,
  STILLPOINT_CRITICAL= 2
};

/** Number of connections of the pool that hold a resource. */
extern std::atomic<int> stillpoint_holders;

/** True in the test that shows the purpose of roles, parking and holders: points alone, as in WfPatch's MariaDB. */
extern bool stillpoint_naive;

/** Initialises the library; call it before the first thread registers. */
void stillpoint_start();
/** Registers a new thread that serves connections; it blocks after all others until it sets its role. */
void stillpoint_birth(const char *name);
void stillpoint_birth_of_main();
void stillpoint_set_role(stillpoint_role role);

/** Returns true if others may wait for a resource that a connection holds by itself. */
bool stillpoint_thd_holds(THD *thd);
/** Returns true if there is an XA transaction; a prepared one may belong to no connection. */
bool stillpoint_xa_open();

/* One thread per connection. */
void stillpoint_point_between_commands(THD *thd);
bool stillpoint_read_begin(THD *thd);
void stillpoint_read_end(bool parked);
CONNECT *stillpoint_park_in_cache();

/* Thread pool. */
void stillpoint_connection_holds(TP_connection *connection, bool holds);
void stillpoint_worker_point();
/** Returns true if others may wait for a resource of a connection: then no thread of the pool blocks or is parked. */
bool stillpoint_pool_holds();
bool stillpoint_wait_begin();
void stillpoint_wait_end(bool parked);
/** Work of the pool in the library's callbacks. */
int stillpoint_pool_wake(unsigned level);
void stillpoint_pool_settled();

/** Returns true if this thread has a request to handle. */
static inline bool stillpoint_pending()
{
  return unlikely(__atomic_load_n(&sp_request_bell, __ATOMIC_RELAXED) != sp_request_seen);
}

/** Returns true if threads block at the current request; at a local one they continue at once. */
static inline bool stillpoint_is_barrier()
{
  uint32_t mode= __atomic_load_n(&sp_control.request.mode, __ATOMIC_ACQUIRE);
  return mode == SP_GLOBAL || mode == SP_GROUP;
}

#endif
