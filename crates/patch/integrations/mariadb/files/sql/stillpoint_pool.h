/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * stillpoint_pool.h - points of the thread pool; for threadpool_generic.cc only
 *
 * While a barrier gathers, a connection that holds a resource is served until it holds none; the next command of any
 * other is postponed until the request is settled. So transactions end and none begins, the queue becomes empty, and
 * every thread sleeps: no thread has to block with unfinished work, and no needed thread sleeps. New connections are
 * accepted all the time; their first command is postponed.
 *
 * Reason for holders in addition to priorities: between two statements a transaction has no thread of its own. If
 * listeners blocked one by one, the first would leave its group without a listener while a worker of another group waits
 * for a row that a connection of the first has locked.
 */
#ifndef STILLPOINT_POOL_H
#define STILLPOINT_POOL_H

#include "stillpoint_points.h"

/** Interval at which a listener that must not be parked checks if it may be. */
static const int STILLPOINT_LOOK_MS= 5;

static void stillpoint_put_back(thread_group_t *group);

/** Returns true while the current request gathers. */
static bool stillpoint_gathers()
{
  return __atomic_load_n(&sp_control.answer.number, __ATOMIC_ACQUIRE) ==
           __atomic_load_n(&sp_request_bell, __ATOMIC_ACQUIRE) &&
         __atomic_load_n(&sp_control.answer.outcome, __ATOMIC_ACQUIRE) == SP_GATHERING;
}

/** Call it before a command is served; returns true if the command was postponed. */
static bool stillpoint_put_off(TP_connection_generic *connection, thread_group_t *group)
{
  stillpoint_set_role(STILLPOINT_ACTIVE);
  if (!stillpoint_pending() || stillpoint_naive)
    return false;
  stillpoint_worker_point();
  if (!stillpoint_pending() || !stillpoint_is_barrier() || connection->stillpoint_holds || !connection->thd ||
      stillpoint_xa_open())
    return false;
  mysql_mutex_lock(&group->mutex);
  group->stillpoint_put_off.push_back(connection);
  /* The thread that settles the request takes the mutex afterwards and finds it; or has done so already. */
  if (!stillpoint_gathers())
    stillpoint_put_back(group);
  mysql_mutex_unlock(&group->mutex);
  return true;
}

/** Prepares a worker for sleep; the group's mutex is held. */
static bool stillpoint_sleep_begin()
{
  stillpoint_set_role(STILLPOINT_SLEEPING);
  return stillpoint_wait_begin();
}

/** Resumes a worker after sleep, which may have to block: without the group's mutex, and not counted as active. */
static void stillpoint_sleep_end(bool parked, thread_group_t *group)
{
  if (!parked && !stillpoint_pending())
    return;
  group->active_thread_count--;
  mysql_mutex_unlock(&group->mutex);
  stillpoint_wait_end(parked);
  mysql_mutex_lock(&group->mutex);
  group->active_thread_count++;
}

/** Waits for events. If it blocks with received events, these belong to connections that hold no resource. */
static int stillpoint_listen(TP_file_handle pollfd, native_event *events, int maxevents, int timeout_ms)
{
  int count;
  stillpoint_set_role(STILLPOINT_CRITICAL);
  do
  {
    const bool parked= stillpoint_wait_begin();
    count= io_poll_wait(pollfd, events, maxevents, parked ? timeout_ms : STILLPOINT_LOOK_MS);
    stillpoint_wait_end(parked);
  } while (count == 0);
  return count;
}

/** Pauses the timer, which creates workers for stalled groups, so it blocks as late as listeners. */
static int stillpoint_tick(mysql_cond_t *cond, mysql_mutex_t *mutex, const struct timespec *until)
{
  const bool parked= stillpoint_wait_begin();
  int error= mysql_cond_timedwait(cond, mutex, until);
  mysql_mutex_unlock(mutex);
  stillpoint_wait_end(parked);
  if (!stillpoint_gathers())
    stillpoint_pool_settled();
  mysql_mutex_lock(mutex);
  return error;
}

static void stillpoint_pool_up();
static void stillpoint_pool_down();

#endif
