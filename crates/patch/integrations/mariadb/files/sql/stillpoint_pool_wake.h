/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * stillpoint_pool_wake.h - the library's callbacks for the pool; included at the end of threadpool_generic.cc
 */
#ifndef STILLPOINT_POOL_WAKE_H
#define STILLPOINT_POOL_WAKE_H

/** Keeps the groups in existence while a callback walks them. */
static pthread_mutex_t stillpoint_groups= PTHREAD_MUTEX_INITIALIZER;
static bool stillpoint_groups_stand;

static void stillpoint_pool_up()
{
  pthread_mutex_lock(&stillpoint_groups);
  stillpoint_groups_stand= true;
  pthread_mutex_unlock(&stillpoint_groups);
}

static void stillpoint_pool_down()
{
  pthread_mutex_lock(&stillpoint_groups);
  stillpoint_groups_stand= false;
  pthread_mutex_unlock(&stillpoint_groups);
}

/** Calls `visit` with each group in use, its mutex held. */
template <typename Visit> static void stillpoint_each_group(Visit visit)
{
  pthread_mutex_lock(&stillpoint_groups);
  for (uint i= 0; stillpoint_groups_stand && i < threadpool_max_size; i++)
  {
    thread_group_t *group= &all_groups[i];
    mysql_mutex_lock(&group->mutex);
    if (group->pollfd != INVALID_HANDLE_VALUE && !group->shutdown)
      visit(group);
    mysql_mutex_unlock(&group->mutex);
  }
  pthread_mutex_unlock(&stillpoint_groups);
}

/** Returns postponed connections to the queues; the group's mutex is held. */
static void stillpoint_put_back(thread_group_t *group)
{
  bool any= false;
  while (TP_connection_generic *connection= group->stillpoint_put_off.pop_front())
  {
    group->queues[connection->priority].push_back(connection);
    any= true;
  }
  if (any && group->active_thread_count == 0)
    wake_or_create_thread(group);
}

void stillpoint_pool_settled()
{
  stillpoint_each_group(stillpoint_put_back);
}

/*
  Listeners check by themselves. Sleeping workers that were not parked reach their point, and sleep again, parked, once
  no resource is held; before that they may migrate at requests at which no thread blocks.
*/
int stillpoint_pool_wake(unsigned level)
{
  const bool sleepers= level == STILLPOINT_SLEEPING || stillpoint_naive;
  if (sleepers && (stillpoint_naive || !stillpoint_pool_holds() || !stillpoint_is_barrier()))
    stillpoint_each_group([](thread_group_t *group) {
      while (wake_thread(group, false) == 0)
      {
      }
    });
  if (level == STILLPOINT_CRITICAL)
  {
    pthread_mutex_lock(&stillpoint_groups);
    if (stillpoint_groups_stand)
      mysql_cond_signal(&pool_timer.cond);
    pthread_mutex_unlock(&stillpoint_groups);
  }
  return 1;
}

#endif
