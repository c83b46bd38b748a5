/* SPDX-License-Identifier: MIT OR Apache-2.0 */

#include "mariadb.h"
#include <poll.h>
#include "sql_class.h"
#include "mysqld.h"
#include "sql_connect.h"
#include "thread_cache.h"
#include "threadpool.h"
#include "stillpoint_points.h"

std::atomic<int> stillpoint_holders;
bool stillpoint_naive;

/** The role that this thread has set in the library. */
static thread_local stillpoint_role role;
/** True if the last command's own transaction holds a resource; naive points check only this. */
static thread_local bool last_command_holds;

static int wake(unsigned level, void *)
{
  return stillpoint_pool_wake(level);
}

static unsigned long thread_count(void *)
{
  return THD_count::value();
}

static void patch_done(uint32_t, int, void *)
{
  stillpoint_pool_settled();
}

void stillpoint_start()
{
  struct sp_config config= {};
  config.size= sizeof config;
  config.priorities= 3;
  config.wake= wake;
  config.thread_count= thread_count;
  config.patch_done= patch_done;
  stillpoint_naive= getenv("STILLPOINT_MARIADB_NAIVE") != nullptr;
  if (int error= sp_init(&config))
    sql_print_warning("stillpoint: no quiescence points (error %d)", -error);
}

void stillpoint_birth(const char *name)
{
  role= stillpoint_naive ? STILLPOINT_ACTIVE : STILLPOINT_CRITICAL;
  sp_thread_birth_role(name, "clients", role);
}

void stillpoint_birth_of_main()
{
  /* Without parking it would wait in poll() for ever, which is not the purpose of the naive form. */
  if (!stillpoint_naive)
    stillpoint_birth("main");
}

void stillpoint_set_role(stillpoint_role wanted)
{
  if (role == wanted || stillpoint_naive)
    return;
  role= wanted;
  sp_set_priority(wanted);
}

bool stillpoint_thd_holds(THD *thd)
{
  return thd->in_active_multi_stmt_transaction() ||
         thd->mdl_context.has_locks() ||
         thd->locked_tables_mode ||
         thd->global_read_lock.is_acquired() ||
         thd->ull_hash.records ||
         thd->current_backup_stage != BACKUP_FINISHED ||
         thd->transaction->xid_state.is_explicit_XA();
}

/** Passes a point, unless this thread would have to block there and must not. */
static void point(bool holds)
{
  if (!holds || !stillpoint_is_barrier())
    sp_quiescence_point();
}

/** Returns true also for a thread that might commit a prepared transaction of no connection: it must not block either. */
static bool must_not_stand(THD *thd)
{
  return stillpoint_thd_holds(thd) || stillpoint_xa_open();
}

void stillpoint_point_between_commands(THD *thd)
{
  stillpoint_set_role(STILLPOINT_ACTIVE);
  if (stillpoint_pending())
    point(must_not_stand(thd));
}

/*
  Waits for the client of a thread that must not be parked: the thread checks from time to time if it may be now, or if
  there is a request at which it need not block. The timeout of the read that follows is the rest of the client's
  timeout.
*/
static void await_client(THD *thd)
{
  const int look_ms= 50;
  NET *net= &thd->net;
  Vio *vio= net->vio;
  struct pollfd socket= {vio_fd(vio), POLLIN, 0};
  ulonglong left_ms= 1000ULL * thd->get_net_wait_timeout();
  if (net->compress && net->remain_in_buf)
    return;
  while (must_not_stand(thd) && left_ms > look_ms && !vio->has_data(vio) && poll(&socket, 1, look_ms) == 0)
  {
    left_ms-= look_ms;
    if (stillpoint_pending())
      point(true);
  }
  my_net_set_read_timeout(net, (uint) (left_ms / 1000 + 1));
}

/*
  A silent client delays no other thread, unless it holds a resource: then its thread counts as busy until the client has
  finished. A worker of the pool reads data that has arrived, in the middle of a command.
*/
bool stillpoint_read_begin(THD *thd)
{
  if (stillpoint_naive || thd->event_scheduler.data)
    return false;
  if (must_not_stand(thd))
    await_client(thd);
  return !must_not_stand(thd) && sp_park_begin() == 0;
}

void stillpoint_read_end(bool parked)
{
  if (parked)
    sp_park_end();
  else if (stillpoint_pending())
    point(true);
}

/* Parks around the whole call: at the end a thread may block, and must not do so with the cache's mutex. */
CONNECT *stillpoint_park_in_cache()
{
  stillpoint_set_role(STILLPOINT_CRITICAL);
  const bool parked= !stillpoint_naive && sp_park_begin() == 0;
  CONNECT *connect= thread_cache.park();
  if (parked)
    sp_park_end();
  return connect;
}

/* Called by the worker that has the connection, so never by two at once. */
void stillpoint_connection_holds(TP_connection *connection, bool holds)
{
  last_command_holds= holds;
  if (connection->stillpoint_holds == holds)
    return;
  connection->stillpoint_holds= holds;
  stillpoint_holders+= holds ? 1 : -1;
}

bool stillpoint_pool_holds()
{
  return stillpoint_holders > 0 || stillpoint_xa_open();
}

void stillpoint_worker_point()
{
  if (stillpoint_pending())
    point(stillpoint_naive ? last_command_holds : stillpoint_pool_holds());
}

bool stillpoint_wait_begin()
{
  if (stillpoint_naive || stillpoint_pool_holds())
    return false;
  return sp_park_begin() == 0;
}

void stillpoint_wait_end(bool parked)
{
  if (parked)
    sp_park_end();
  else if (stillpoint_pending())
    point(!stillpoint_naive && stillpoint_pool_holds());
}
