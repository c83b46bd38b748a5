/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * stillpoint_points.h - where MariaDB's threads hold no state of old code, and when they must not stand there
 *
 * A thread stands at a group or global request only when nobody can be waiting for what it, or a connection that it
 * would serve, holds: an open transaction, LOCK TABLES, FLUSH TABLES WITH READ LOCK, GET_LOCK, a HANDLER, a backup
 * stage, a prepared XA transaction. A transaction is served to its end by the code it began with. At a local request
 * nobody stands, and a patch that may be taken by one thread at a time touches nothing that threads share: there the
 * points count between the statements of a transaction as well.
 *
 * Roles, in the order in which they stand: active worker (or the thread of a connection), sleeping worker, and what
 * both depend on: listener, timer, the thread that accepts connections, threads at their birth.
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

/** Connections of the pool that hold something. */
extern std::atomic<int> stillpoint_holders;

/** For the test that shows what roles, parking and holders are for: points alone, as in WfPatch's MariaDB. */
extern bool stillpoint_naive;

/** Makes the library ready; before the first thread that takes part. */
void stillpoint_start();
/** A thread that serves connections is born; it stands after all others until it says what it does. */
void stillpoint_birth(const char *name);
void stillpoint_birth_of_main();
void stillpoint_set_role(stillpoint_role role);

/** Whether others may wait for what a connection holds by itself. */
bool stillpoint_thd_holds(THD *thd);
/** Whether there is an XA transaction; a prepared one may belong to no connection. */
bool stillpoint_xa_open();

/* One thread per connection. */
void stillpoint_point_between_commands(THD *thd);
bool stillpoint_read_begin(THD *thd);
void stillpoint_read_end(bool parked);
CONNECT *stillpoint_park_in_cache();

/* Thread pool. */
void stillpoint_connection_holds(TP_connection *connection, bool holds);
void stillpoint_worker_point();
/** Whether others may wait for what connections hold: then no thread of the pool stands or is parked. */
bool stillpoint_pool_holds();
bool stillpoint_wait_begin();
void stillpoint_wait_end(bool parked);
/** What the pool does in the library's callbacks. */
int stillpoint_pool_wake(unsigned level);
void stillpoint_pool_settled();

/** Whether this thread has a request to deal with. */
static inline bool stillpoint_pending()
{
  return unlikely(__atomic_load_n(&sp_request_bell, __ATOMIC_RELAXED) != sp_request_seen);
}

/** Whether threads stand at the current request; those of a local one go on at once. */
static inline bool stillpoint_is_barrier()
{
  uint32_t mode= __atomic_load_n(&sp_control.request.mode, __ATOMIC_ACQUIRE);
  return mode == SP_GLOBAL || mode == SP_GROUP;
}

#endif
